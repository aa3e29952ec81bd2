"""tests/helpers/fresh_process.py: a server that died, what its processes print, and the environment that they have."""

import os
import sys

import pytest
from helpers import ROOT, fresh_process, processes

WITH_A_DEAD_SERVER = """
import multiprocessing, socket, sys
from multiprocessing import connection
from helpers import fresh_process

address = connection.arbitrary_address("AF_UNIX")
with socket.socket(socket.AF_UNIX) as server:
    server.bind(address)
fresh_process.IMPORTED.clear()
fresh_process.join_server({"_forkserver_address": address})
for word in ("one", "two"):
    process = multiprocessing.get_context("forkserver").Process(target=print, args=[word], kwargs={"flush": True})
    process.start()
    process.join()
"""


def test_a_server_that_died_is_replaced(tmp_path):
    printed = fresh_process.run("-c", WITH_A_DEAD_SERVER, folder=tmp_path, paths=[ROOT / "tests", ROOT])
    assert printed.split() == ["one", "two"]


def print_and_exit():
    print("a line")
    os.write(2, b"an error\n")
    sys.exit(3)


def test_what_a_process_that_failed_has_printed_is_shown(tmp_path, capsys):
    with pytest.raises(Exception, match="exit code 3"):
        processes.spawn(print_and_exit, 1, tmp_path)
    shown = capsys.readouterr().out.splitlines()
    assert {"--- rank 0 ---", "a line", "an error"} <= {*shown}


def test_processes_have_the_environment_of_before_any_test(tmp_path):
    """PACKING_OPS_CHECK is that of a fixture."""
    printed = fresh_process.run("-c", "import os; print(os.environ.get('PACKING_OPS_CHECK'))", folder=tmp_path)
    assert printed.strip() == str(fresh_process.ENVIRONMENT.get("PACKING_OPS_CHECK"))
