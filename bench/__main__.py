import sys

from bench.stops import INTERRUPTED, Stop


def main() -> None:
    stop = Stop()
    try:
        from harness.host.packages import require

        require()
        from bench.cli import main as run_command

        run_command()
    except SystemExit as end:
        # Typer turns an interrupt into an exit.
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            print(INTERRUPTED, file=sys.stderr)
        raise
    except BaseException:  # libraries may raise others when they are interrupted
        if not stop.requested:
            raise
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    finally:
        stop.end()


if __name__ == "__main__":
    main()
