"""Models as other engines take them: a format is one file, and a row of ``export.FORMATS``."""
