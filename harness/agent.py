"""python -m harness.agent: a node of a multi-node run.

Kept tiny: multiprocessing imports it again in every rank.
"""

if __name__ == "__main__":
    from harness.host.packages import REQUIREMENTS, TRAINING, require

    require(REQUIREMENTS | TRAINING)
    from harness.nodes.agent import main

    main()
