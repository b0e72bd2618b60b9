"""python -m bench. Tiny, as multiprocessing imports it again in every rank."""


def main() -> None:
    from harness.host.packages import require

    require()
    from bench.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
