"""Where samples come from (sources) and how they are read (loaders)."""
