"""python -m bench. Kept tiny: multiprocessing imports it again in every rank."""

if __name__ == "__main__":
    from bench.cli import main

    main()
