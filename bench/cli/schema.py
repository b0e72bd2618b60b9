from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON schema of a matrix file.

    Editors complete and check matrices with it. The suite's own matrices name it.

    Example: [bold]python -m bench schema > matrix.schema.json[/bold]
    """
    from bench.matrix import Matrix

    written = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    print(json.dumps(written | Matrix.model_json_schema(), indent=2))
