"""python -m harness.agent: a node of a multi-node run."""

if __name__ == "__main__":
    from harness.host.packages import REQUIREMENTS, TRAINING, require

    require(REQUIREMENTS | TRAINING)
    from harness.nodes.agent import main

    main()
