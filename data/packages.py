"""What a program says if a package that it needs is not installed."""
import importlib.util
import sys


def require(*names: str) -> None:
    """Ends the program with a sentence and exit status 2 if one of the packages is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            print(
                f"{sys.argv[0]}: {name} is not installed for {sys.executable}; enter the "
                "environment that ./run.sh makes: . .venv/bin/activate", file=sys.stderr)
            sys.exit(2)
