"""``python -m flashkda``: the same as the ``flashkda`` script."""

from flashkda.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
