"""The sections of a run's report, in their order."""

from __future__ import annotations

from reports import effects, experts, facts, markdown_parts, parts
from reports.run_report import RunReport
from reports.sections import Section

SECTIONS: tuple[Section[RunReport], ...] = (
    Section("verdict", "Verdict", parts.verdict_part, markdown_parts.verdict_text),
    Section("largest", "Largest trainable model, or longest sequence", parts.largest_part),
    Section(
        "effects",
        "What to turn on first",
        effects.effects_part,
        effects.effects_text,
        "Turn on first",
    ),
    Section("systems", "Systems", parts.systems_part),
    Section("ranking", "Throughput", parts.ranking_part, markdown_parts.ranking_text),
    Section("memory", "Peak memory", parts.memory_part),
    Section("front", "Memory against throughput", parts.front_part),
    Section("scaling", "Scaling", parts.scaling_part, markdown_parts.scaling_text),
    Section("states", "Where the memory goes", parts.states_part),
    Section("parts", "Where the time goes", parts.time_part),
    Section("traffic", "Communication", parts.traffic_part),
    Section("links", "Links", parts.links_part, markdown_parts.links_text),
    Section(
        "parity",
        "Parity: is it the same training?",
        parts.parity_part,
        markdown_parts.parity_text,
        "Parity",
    ),
    Section("bubble", "Pipeline bubble", parts.bubble_part),
    Section("experts", "Experts", experts.experts_part, experts.experts_text),
    Section("wrappers", "Launchers compared", parts.wrappers_part),
    Section(
        "variants",
        "Fewer trained parameters, lower precision",
        parts.variants_part,
        short="Fewer parameters",
    ),
    Section("cells", "All cells", parts.cells_part),
    Section(
        "failures",
        "What failed, diverged or did not run",
        parts.failures_part,
        markdown_parts.failures_text,
        "What did not run",
    ),
    Section(
        "environment",
        "Environment",
        lambda report, _: facts.environment(report.run),
        markdown_parts.environment_text,
    ),
    Section("method", "How it was measured", parts.method_part, markdown_parts.method_text),
    Section("glossary", "Glossary", lambda *_: True),
)
