"""What the adapters use of TRL, imported when they are called: nothing here needs it before."""

from types import ModuleType


def trl_data_utils() -> ModuleType:
    try:
        import trl.data_utils
    except ImportError as error:
        raise ImportError("packing_ops.integrations.trl needs TRL: pip install 'trl>=1' datasets") from error
    return trl.data_utils
