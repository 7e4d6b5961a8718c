"""Where the configuration tree lies."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.errors import ConfigurationError


def conf_dir() -> Path:
    """The `conf` folder: `$KVFERRY_CONF`, or the one of the checkout that this package lies in.

    Raises:
        ConfigurationError: there is none.
    """
    named = os.environ.get("KVFERRY_CONF")
    folder = Path(named).expanduser() if named else Path(__file__).parents[3] / "conf"
    if not (folder / "config.yaml").is_file():
        raise ConfigurationError(
            "The configuration tree was not found.",
            found=folder,
            fix="Install from a checkout with `pip install -e .`, or point KVFERRY_CONF at `conf`.",
        )
    return folder.resolve()
