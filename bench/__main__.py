import sys

from bench.stops import INTERRUPTED, Stop


def main() -> None:
    stop = Stop()
    try:
        from harness.host.packages import require

        require()
        from bench.cli import main as run_command

        run_command()
    except SystemExit:
        raise
    except BaseException:  # libraries may raise others when they are interrupted
        if not stop.requested:
            raise
        print(INTERRUPTED, file=sys.stderr)
        sys.exit(130)
    finally:
        stop.requested = True


if __name__ == "__main__":
    main()
