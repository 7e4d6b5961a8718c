"""``python -m kvferry``: the same as ``kvferry``."""

from kvferry.app.cli import main

if __name__ == "__main__":
    main()
