"""Tests of the versions that results have."""

from benchmarks.record import versions


def install(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_version_is_of_the_imported_package(tmp_path, monkeypatch):
    install(tmp_path / "imported", "libtpu", "2.0")
    install(tmp_path / "left_over", "libtpu", "1.0")
    monkeypatch.syspath_prepend(tmp_path / "left_over")
    monkeypatch.syspath_prepend(tmp_path / "imported")
    assert versions()["libtpu"] == "2.0"


def test_missing_packages_are_left_out(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    assert versions() == {}
