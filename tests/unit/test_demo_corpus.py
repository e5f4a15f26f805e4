"""The corpus: same files, same order, same split on every call and whatever else lies around."""

import numpy as np
import pytest

from syncer.demo.model import corpus
from syncer.errors import ConfigError


@pytest.fixture
def library(tmp_path):
    """A small standard library: forty modules and everything that must not be read."""
    for number in range(40):
        package = tmp_path / f"package{number % 3}"
        package.mkdir(exist_ok=True)
        (package / f"module{number}.py").write_text(f"value = {number}\n" * 200)
    for skipped in corpus.SKIPPED_DIRECTORIES:
        (tmp_path / "package0" / skipped).mkdir()
        (tmp_path / "package0" / skipped / "never.py").write_text("never\n" * 200)
    (tmp_path / "_sysconfigdata__linux.py").write_text("never\n" * 200)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "notes.txt").write_text("never\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "package0" / "module0.py")
    return tmp_path


def test_rule_keeps_source_and_nothing_else(library):
    files = corpus.corpus_files(library)
    assert sorted(path.name for path in files) == sorted(f"module{n}.py" for n in range(40))


def test_order_depends_on_relative_paths_only(library, tmp_path_factory):
    copy = tmp_path_factory.mktemp("elsewhere")
    for path in reversed(corpus.corpus_files(library)):
        target = copy / path.relative_to(library)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    names = [path.relative_to(library) for path in corpus.corpus_files(library)]
    assert names == [path.relative_to(copy) for path in corpus.corpus_files(copy)]
    assert names != sorted(names), "the order must not follow the directory tree"


def test_every_tenth_file_is_held_out_and_shards_cover_the_rest(library):
    files = corpus.corpus_files(library)
    held_out = b"".join(path.read_bytes() + b"\0" for path in files[9::10])
    loaded = [corpus.load(shard, 3, library) for shard in range(3)]
    assert all(part.held_out.tobytes() == held_out for part in loaded)
    assert all(part.files == 40 for part in loaded)
    pieces = [piece for part in loaded for piece in part.shard.tobytes().split(b"\0") if piece]
    expected = [p.read_bytes() for n, p in enumerate(files) if n % 10 != 9]
    assert sorted(pieces) == sorted(expected)


def test_total_size_is_bounded(library):
    files = corpus.corpus_files(library)
    bound = sum(path.stat().st_size for path in files[:7])
    assert corpus.corpus_files(library, bytes_max=bound) == files[:7]
    assert corpus.corpus_files(library, bytes_max=bound - 1) == files[:6]


def test_too_little_text_is_one_sentence(tmp_path):
    (tmp_path / "only.py").write_text("pass\n")
    with pytest.raises(ConfigError, match="too little training text: the shard has 6 bytes"):
        corpus.load(0, 1, tmp_path)
    with pytest.raises(ConfigError, match="too little training text: the shard has 0 bytes"):
        corpus.load(0, 1, tmp_path / "absent")


def test_shard_out_of_range():
    with pytest.raises(ConfigError, match="shard 3 does not exist"):
        corpus.load(3, 3)


def test_real_library_of_this_python():
    first, again = corpus.load(1, 3), corpus.load(1, 3)
    assert np.array_equal(first.shard, again.shard)
    assert np.array_equal(first.held_out, again.held_out)
    other = corpus.load(2, 3)
    assert np.array_equal(first.held_out, other.held_out)
    assert not np.array_equal(first.shard[:1000], other.shard[:1000])
    total = first.held_out.size + sum(corpus.load(s, 3).shard.size for s in range(3))
    assert 1 << 20 < total <= corpus.CORPUS_BYTES_MAX + first.files
    assert 0.03 < first.held_out.size / total < 0.3
