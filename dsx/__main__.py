"""``python -m dsx`` is the command ``dsx``, also where its script is not on the path."""

from dsx.cli.app import main

if __name__ == "__main__":
    main()
