"""`python -m elasticgang` and `elasticgang` are the command line."""

import sys


def main() -> int:
    try:  # a first Ctrl-C may come while the command line is imported
        from elasticgang.launch import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
