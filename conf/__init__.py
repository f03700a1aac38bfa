# Empty: makes the folder importable as `lowvram.conf` in the wheel, for Hydra's pkg://lowvram.conf.
