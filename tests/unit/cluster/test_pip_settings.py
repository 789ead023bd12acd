"""Machine's pip settings for builds inside an image."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.pipsettings import for_image, read


def test_environment_precedes_pip_files() -> None:
    listed = ":env:.timeout='180'\nglobal.timeout='15'\nglobal.index-url='https://index.example'\n"
    expected = {"timeout": "180", "index-url": "https://index.example"}
    assert read(listed) == expected
    assert read("\n".join(reversed(listed.splitlines()))) == expected


def test_settings_of_other_pip_commands_are_ignored() -> None:
    assert read("install.no-deps='1'\nfreeze.all='1'\n") == {"no-deps": "1"}


def test_files_are_mounted_at_the_configured_paths(tmp_path: Path) -> None:
    wheels, certificate = tmp_path / "wheels", tmp_path / "ca.pem"
    wheels.mkdir()
    text, mounts = for_image(
        {"cert": str(certificate), "find-links": f"{wheels} {tmp_path}/gone https://links.example"}
    )
    assert set(mounts) == {wheels, certificate}
    assert f"cert = {mounts[certificate]}" in text
    assert f"find-links = {mounts[wheels]} https://links.example" in text
    assert str(tmp_path) not in text


def test_without_pip_settings_only_the_heading_is_written() -> None:
    assert for_image({}) == ("[global]\n", {})
