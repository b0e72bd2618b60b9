"""ResNet image classification. BatchNorm sees only one replica's samples: data parallelism changes
the training unless statistics are synchronised."""

from __future__ import annotations

from harness.workloads.family import Family

FAMILY = Family(
    name="resnet",
    kind="image",
    config_class="ResNetConfig",
    model_class="ResNetForImageClassification",
    sizes={
        "micro": {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 64],
            "depths": [1, 1, 1],
            "layer_type": "basic",
            "num_labels": 10,
        },
        "50": {"num_labels": 1000},
    },
    common={},
    batch_norm=True,
    image_size=lambda size: 32 if size == "micro" else 224,
)
