"""Machine's pip settings for builds inside an image."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.pipsettings import for_image, read


def test_the_environment_goes_before_the_files() -> None:
    listed = ":env:.timeout='180'\nglobal.timeout='15'\nglobal.index-url='https://index.example'\n"
    expected = {"timeout": "180", "index-url": "https://index.example"}
    assert read(listed) == expected
    assert read("\n".join(reversed(listed.splitlines()))) == expected


def test_other_commands_settings_are_left_out() -> None:
    assert read("install.no-deps='1'\nfreeze.all='1'\n") == {"no-deps": "1"}


def test_files_are_mounted_where_the_settings_say_they_are(tmp_path: Path) -> None:
    wheels, certificate = tmp_path / "wheels", tmp_path / "ca.pem"
    wheels.mkdir()
    text, mounts = for_image(
        {"cert": str(certificate), "find-links": f"{wheels} {tmp_path}/gone https://links.example"}
    )
    assert set(mounts) == {wheels, certificate}
    assert f"cert = {mounts[certificate]}" in text
    assert f"find-links = {mounts[wheels]} https://links.example" in text
    assert str(tmp_path) not in text


def test_without_settings_there_is_only_a_heading() -> None:
    assert for_image({}) == ("[global]\n", {})
