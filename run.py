"""The entry of every run: `python run.py --help`."""

import sys

from kvferry.app.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
