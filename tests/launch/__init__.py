from tests import ROOT

LAUNCH = ROOT / "launch"
