"""A start that waits for a build lock says which."""

import time

from al_deepspeed.build_locks import told_of_build_locks


def test_a_start_that_waits_names_the_lock(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with told_of_build_locks(after_s=0.0):
        deadline = time.monotonic() + 10
        while not (said := capfd.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert f"locked by {lock}" in said and "remove that file" in said


def test_a_start_that_ends_in_time_says_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "lock").touch()
    with told_of_build_locks(after_s=0.2):
        pass
    time.sleep(0.4)
    assert capfd.readouterr().err == ""
