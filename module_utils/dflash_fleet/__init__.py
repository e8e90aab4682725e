"""dflash-fleet: the logic its Ansible modules and the engine supervisor share (standard library only)."""

__version__ = "0.1.0"
