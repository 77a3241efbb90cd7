"""The fast GGUF reader returns what the gguf package's reader returns."""

from __future__ import annotations

from pathlib import Path

import gguf

from floodplain.model.weights.gguf_header import read_gguf
from floodplain.model.weights.open_model import packaged_smollm2


def write(path: Path, name: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_token_list([f"{name} {i}" for i in range(50)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def contents(reader: gguf.GGUFReader) -> dict[str, object]:
    return {name: field.contents() for name, field in reader.fields.items()}


def test_it_reads_what_the_packages_own_reader_reads() -> None:
    path = packaged_smollm2()
    quick, own = read_gguf(path, 0), gguf.GGUFReader(path)
    assert contents(quick) == contents(own)
    assert [(t.name, t.data.tobytes()[:64]) for t in quick.tensors] == [
        (t.name, t.data.tobytes()[:64]) for t in own.tensors
    ]


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "before")
    before = read_gguf(path, 1)
    assert read_gguf(path, 1) is before
    path.unlink()  # the mapped file stays unchanged
    write(path, "after")
    assert contents(read_gguf(path, 2))["general.name"] == "after"
