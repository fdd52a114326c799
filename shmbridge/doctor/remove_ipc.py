"""Whether systemd-logind removes this user's segments at the last logout (`RemoveIPC`)."""

import os
import pwd
import re
from pathlib import Path

from shmbridge.doctor.check import Check

# In the order in which systemd looks: an earlier folder's file stands for one of the same name in a later.
_FOLDERS = ("etc/systemd", "run/systemd", "usr/local/lib/systemd", "usr/lib/systemd", "lib/systemd")
_MOST_SYSTEM_UID = 999
_YES, _NO = ("1", "yes", "y", "true", "t", "on"), ("0", "no", "n", "false", "f", "off")


def logout(root: Path = Path("/"), uid: int | None = None, user: str | None = None) -> Check:
    """Whether the names of living segments go when this user logs out. Reads files; asks no service."""
    uid = os.geteuid() if uid is None else uid
    if not (root / "run/systemd/system").is_dir() or not (root / "run/systemd/users").is_dir():
        return _not_applicable("no systemd-logind runs here, as in most containers")
    if uid <= _most_system_uid(root):
        return _not_applicable(f"uid {uid} is a system user, whose segments systemd-logind leaves alone")
    user = _name_of(uid) if user is None else user
    if not _in_session(root, uid) and not (root / f"run/systemd/users/{uid}").exists():
        return _not_applicable(f"uid {uid} is not logged in, so this is a service or a container")
    if (root / "var/lib/systemd/linger" / user).exists():
        return Check("logout", "ok", f"{user} lingers: a logout removes no segments")
    removes, where = _setting(root)
    if not removes:
        return Check("logout", "ok", f"RemoveIPC=no in {where}: a logout removes no segments")
    return Check(
        "logout",
        "warn",
        f"RemoveIPC=yes ({where}): the last logout of {user} removes the names of living segments",
        f"loginctl enable-linger {user}, or RemoveIPC=no in /etc/systemd/logind.conf",
    )


def _not_applicable(why: str) -> Check:
    return Check("logout", "ok", f"RemoveIPC does not apply: {why}")


def _most_system_uid(root: Path) -> int:
    try:
        found = re.search(r"^\s*SYS_UID_MAX\s+(\d+)", (root / "etc/login.defs").read_text(), re.MULTILINE)
    except OSError:
        return _MOST_SYSTEM_UID
    return int(found[1]) if found else _MOST_SYSTEM_UID


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _in_session(root: Path, uid: int) -> bool:
    """Returns whether this process belongs to a login of the user, by its cgroup."""
    try:
        return f"/user-{uid}.slice" in (root / "proc/self/cgroup").read_text()
    except OSError:
        return False


def _setting(root: Path) -> tuple[bool, str]:
    """Returns the value in force and the file that says so; files of `logind.conf.d` come after the main one,
    by their names.
    """
    main = next((root / each / "logind.conf" for each in _FOLDERS if _is_file(root, each)), None)
    added: dict[str, Path] = {}
    for folder in _FOLDERS:
        for path in (root / folder / "logind.conf.d").glob("*.conf"):
            added.setdefault(path.name, path)
    found = True, "systemd's default"
    for path in ([main] if main else []) + [added[name] for name in sorted(added)]:
        for value in _values(path):
            if value in _YES or value in _NO:
                found = value in _YES, f"/{path.relative_to(root)}"
            elif not value:
                found = True, "systemd's default"
    return found


def _is_file(root: Path, folder: str) -> bool:
    return (root / folder / "logind.conf").is_file()


def _values(path: Path) -> list[str]:
    """Returns what a file gives to RemoveIPC in its section Login, in order."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return []
    found, section = [], ""
    for line in lines:
        if line.startswith("["):
            section = line
        elif section == "[Login]" and (match := re.fullmatch(r"RemoveIPC\s*=\s*(.*)", line)):
            found.append(match[1].lower())
    return found
