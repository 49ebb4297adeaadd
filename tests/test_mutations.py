"""The list of known faults is about the code as it is."""

from tests import ROOT
from tests.mutations import KNOWN


def test_each_known_fault_can_be_made_in_one_place():
    assert [fault for fault in KNOWN if (ROOT / fault[0]).read_text().count(fault[1]) != 1] == []
