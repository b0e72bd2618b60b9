def main() -> None:
    from harness.host.packages import require

    require()
    from bench.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
