"""Files, run directories, processes, devices, threads and progress bars: nothing here knows a model or an image."""
