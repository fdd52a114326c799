"""Where systemd-logind's RemoveIPC applies, and what is in force: roots with the files of several systems."""

import pytest

from shmbridge.doctor.remove_ipc import logout

UID, USER = 1000, "ada"


@pytest.fixture
def system(tmp_path):
    """A machine with systemd-logind, and a process in a session of the user; files come on top."""

    def plant(files: dict[str, str] | None = None, *, cgroup: str = f"0::/user.slice/user-{UID}.slice/s"):
        for folder in ("run/systemd/system", "run/systemd/users", "proc/self"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup + "\n")
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return plant


def test_it_says_something_here() -> None:
    found = logout()
    assert found.name == "logout"
    assert "RemoveIPC" in found.text or "lingers" in found.text


def test_a_session_on_systemds_default_is_warned(system) -> None:
    found = logout(system({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}), UID, USER)
    assert found.state == "warn"
    assert found.text == (
        "RemoveIPC=yes (systemd's default): the last logout of ada removes the names of living segments"
    )
    assert found.fix == "loginctl enable-linger ada, or RemoveIPC=no in /etc/systemd/logind.conf"


LOGIN = "[Login]\nRemoveIPC = {}\n"


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ({"etc/systemd/logind.conf": LOGIN.format("no")}, False),
        ({"usr/lib/systemd/logind.conf": LOGIN.format("off")}, False),
        (
            {
                "etc/systemd/logind.conf": LOGIN.format("yes"),
                "usr/lib/systemd/logind.conf": LOGIN.format("no"),
            },
            True,
        ),
        (
            {
                "etc/systemd/logind.conf": LOGIN.format("yes"),
                "run/systemd/logind.conf.d/9.conf": LOGIN.format("no"),
            },
            False,
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/1.conf": LOGIN.format("no"),
                "etc/systemd/logind.conf.d/1.conf": LOGIN.format("yes"),
            },
            True,
        ),
        (
            {
                "etc/systemd/logind.conf.d/1.conf": LOGIN.format("yes"),
                "usr/lib/systemd/logind.conf.d/2.conf": LOGIN.format("no"),
            },
            False,
        ),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\nRemoveIPC=\n"}, True),
        ({"etc/systemd/logind.conf": "[Other]\nRemoveIPC=no\n"}, True),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=perhaps\n"}, True),
    ],
)
def test_the_setting_in_force(system, files, removes) -> None:
    found = logout(system(files), UID, USER)
    assert found.state == ("warn" if removes else "ok")
    if not removes:
        assert found.text.startswith("RemoveIPC=no in /")


def test_where_it_does_not_apply(system, tmp_path) -> None:
    assert "no systemd-logind runs here" in logout(tmp_path, UID, USER).text
    root = system({"etc/login.defs": "SYS_UID_MAX 499\n"}, cgroup="0::/system.slice/train.service")
    for uid, why in ((0, "is a system user"), (499, "is a system user"), (500, "is not logged in")):
        found = logout(root, uid, USER)
        assert found.state == "ok"
        assert found.text.startswith(f"RemoveIPC does not apply: uid {uid} {why}")


def test_a_service_of_a_user_who_is_logged_in_is_warned(system) -> None:
    root = system({f"run/systemd/users/{UID}": ""}, cgroup="0::/system.slice/train.service")
    assert logout(root, UID, USER).state == "warn"


def test_a_user_who_lingers(system) -> None:
    found = logout(system({f"var/lib/systemd/linger/{USER}": ""}), UID, USER)
    assert (found.state, found.text) == ("ok", "ada lingers: a logout removes no segments")
