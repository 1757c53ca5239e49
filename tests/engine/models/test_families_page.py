"""docs/models.md matches the registry."""

from __future__ import annotations

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from pagemill.engine.models.families.family import Family, native_config
from pagemill.engine.models.families.registry import FAMILIES, SUPPORTED_MODEL_TYPES, find_family
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "models.md"


def table() -> list[list[str]]:
    """The cells of the table of families, row by row."""
    rows = PAGE.read_text().split("| --- | --- | --- | --- |\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def mapping(family: Family) -> str:
    """The required opening words of the page for each way of loading a family."""
    if not family.has_attention_interface:
        return "native, attention replaced"
    return (
        "native"
        if all(kind in CONFIG_MAPPING for kind in family.model_types) and not is_renamed(family)
        else "as "
    )


def is_renamed(family: Family) -> bool:
    return family.name == "InternLM 3"  # supported by transformers since 5.23; older: same loading


def test_table_is_the_registry() -> None:
    expected = [
        [family.name, ", ".join(family.model_types), ", ".join(family.architectures)] for family in FAMILIES
    ]
    assert [row[:3] for row in table()] == expected


def test_table_says_how_each_family_is_loaded() -> None:
    for family, row in zip(FAMILIES, table(), strict=True):
        assert row[3].startswith(mapping(family)), family.name


def test_every_model_type_belongs_to_one_family() -> None:
    assert len(SUPPORTED_MODEL_TYPES) == len(set(SUPPORTED_MODEL_TYPES))
    for family in FAMILIES:
        for kind in family.model_types:
            assert find_family({"model_type": kind}) is family
            assert find_family({"model_type": kind, "architectures": [family.architectures[0]]}) is family


def test_native_architectures_are_transformers_own_names() -> None:
    """save_pretrained writes the class's name; a directory that it wrote must be accepted."""
    for family in FAMILIES:
        for kind in family.model_types:
            if family.build_config is native_config:
                assert MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]].__name__ in family.architectures
