"""Carry a cache over, or let the target read for itself: decided by time and quality, with reasons.

Universal Context-Reuse Layer (arXiv 2608.30963) names such a fallback; the rule here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import InputError
from kvferry.handoff.costs import CostModel
from kvferry.handoff.measured import Measured


@dataclass(frozen=True)
class Decision:
    """What a policy says of one context.

    Args:
        carry: whether the source's cache is carried over; if not, the target reads the text.
        reason: one sentence with the numbers behind it.
        carry_ms, prefill_ms: predicted for either way; None where nothing was timed.
        quality: predicted; None where nothing was measured.
    """

    carry: bool
    reason: str
    carry_ms: float | None = None
    prefill_ms: float | None = None
    quality: float | None = None


@dataclass(frozen=True)
class Policy:
    """Carry if and only if it is expected to be faster and to keep enough.

    ``carry(N) + ship(N) + margin < prefill(N)`` and ``quality >= least_quality``. Quality that was
    not measured is not enough; time that was not measured is not asked for, and the reason says so.

    Args:
        least_quality: of ``metric``, where 1 is native and 0 is no context.
        metric: the held-out number that stands for quality.
        domain: of the text to be carried; None expects the worst domain that was measured.
        margin_ms: what carrying must save at least.
        ship: time to move the cache to where the target runs.
    """

    least_quality: float = 0.5
    metric: str = "kl_retention"
    domain: str | None = None
    margin_ms: float = 0.0
    ship: CostModel = field(default_factory=CostModel)

    def decide(
        self, measured: Measured | None, tokens: int, *, device: str, native_tail: int = 0
    ) -> Decision:
        """Whether to carry a context.

        Args:
            measured: of the mapper.
            tokens: of the source that the context has.
            device: kind of device that the target runs on.
            native_tail: tokens that the target reads itself on top, taken to cost what reading as
                many alone costs.

        Raises:
            InputError: a domain or metric that was not measured.
        """
        if measured is None or not measured.quality:
            return Decision(False, "read natively: nothing was measured of this mapper")
        domain, quality = self._quality(measured)
        kept = f"{self.metric} {quality:.2f} on {domain}"
        carry_ms, prefill_ms = self._times(measured, tokens, device, native_tail)
        facts = {"carry_ms": carry_ms, "prefill_ms": prefill_ms, "quality": quality}
        if quality < self.least_quality:
            reason = f"read natively: {kept} is below {self.least_quality:.2f}"
            return Decision(False, reason, **facts)
        if carry_ms is None or prefill_ms is None:
            return Decision(True, f"carried: {kept}; not timed on {device}", **facts)
        asked = f" and a margin of {self.margin_ms:,.0f}" if self.margin_ms else ""
        times = f"{carry_ms:,.0f} ms{asked} against {prefill_ms:,.0f} ms of native prefill"
        times = f"{times} at {tokens:,} tokens{self._beyond(measured, tokens)}"
        if carry_ms + self.margin_ms < prefill_ms:
            return Decision(True, f"carried: {times}; {kept}", **facts)
        return Decision(False, f"read natively: carrying is not faster, {times}", **facts)

    def _quality(self, measured: Measured) -> tuple[str, float]:
        found = {
            domain: metrics[self.metric]
            for domain, metrics in measured.quality.items()
            if self.metric in metrics and self.domain in (None, domain)
        }
        if not found:
            raise InputError(
                "A policy asks for what was not measured.",
                found=f"metric {self.metric}, domain {self.domain or 'any'}",
                expected="; ".join(
                    f"{domain}: {', '.join(metrics)}"
                    for domain, metrics in measured.quality.items()
                ),
                fix="choose one of these, or evaluate the mapper on that domain",
            )
        worst = min(found, key=lambda domain: found[domain])
        return worst, found[worst]

    def _times(
        self, measured: Measured, tokens: int, device: str, native_tail: int
    ) -> tuple[float | None, float | None]:
        carry, prefill = measured.carry, measured.prefill
        if carry is None or prefill is None or measured.device != device:
            return None, None
        tail = prefill(native_tail) if native_tail else 0.0
        return carry(tokens) + self.ship(tokens) + tail, prefill(tokens)

    def _beyond(self, measured: Measured, tokens: int) -> str:
        shortest, longest = measured.timed_tokens or (0, tokens)
        if shortest <= tokens <= longest:
            return ""
        return f" (timed from {shortest:,} to {longest:,})"
