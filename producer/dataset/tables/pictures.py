"""Images of rows: a column of paths, bytes, URLs or Hugging Face's structs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagemill.producer.client.images import MAX_PATH, base64_url
from pagemill.producer.dataset.tables.picture_folder import PictureFolder
from pagemill.producer.dataset.tables.rows import Row, RowError, Source
from pagemill.producer.dataset.tables.shards import ShardedSource
from pagemill.producer.wire.schema.images import describe_image, is_fetched


def with_pictures(rows: Iterator[Row], column: str, folders: Sequence[Path]) -> Iterator[Row]:
    """Yield rows with the images of a column as `Row.images`, and only their names in the column.

    Args:
        rows: the rows of a source.
        column: has an image or a list of images in every row.
        folders: for each file of the source, the base of relative paths.
    """
    for row in rows:
        if row.fields is None:
            yield row
        elif column not in row.fields:
            yield replace(
                row, fields=None, error=RowError("template_error", f"the row has no column {column}")
            )
        else:
            value = row.fields[column]
            values = value if isinstance(value, list) and value else [value]
            folder = folders[row.shard] if row.shard < len(folders) else Path()
            images, names = zip(*(_picture(one, folder) for one in values), strict=True)
            shown = list(names) if isinstance(value, list) else names[0]
            yield replace(row, fields={**row.fields, column: shown}, images=images)


def picture_folders(source: Source) -> tuple[Path, ...]:
    """Return the folder of each file of a source. For other sources, paths are relative to the process's folder."""
    if isinstance(source, PictureFolder):
        return (source.folder,)
    if isinstance(source, ShardedSource):
        return tuple(shard.path.parent for shard in source.shards)
    path = Path(source.name)
    return (path if path.is_dir() else path.parent,) if path.exists() else ()


def _picture(value: Any, folder: Path) -> tuple[str | bytes | Path | None, Any]:
    """Return an image in the form that clients accept, and its name; None for a missing one."""
    if isinstance(value, Mapping):
        path, content = value.get("path"), value.get("bytes")
        if not isinstance(content, str):
            return _picture(path, folder)
        url = base64_url(content)
        return url or b"another file", path or (describe_image(url) if url else "[unknown]")
    if not isinstance(value, str) or not value.strip():
        return None, value
    if value[:5].lower() == "data:" or is_fetched(value):
        return value, value if is_fetched(value) else describe_image(value)
    if (url := base64_url(value)) is not None:
        return url, describe_image(url)
    return (folder / value, value) if len(value) < MAX_PATH else (b"", "[unknown]")
