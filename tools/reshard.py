"""Converts checkpoints between layouts and formats: ``dsx reshard`` as a program of its own.

python tools/reshard.py SOURCE TARGET --to tp=2,pp=2,dp=2,zero=1
"""

import sys

from dsx.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "reshard")
    main()
