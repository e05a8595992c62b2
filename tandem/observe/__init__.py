"""What a run leaves behind and shows: its folder and clock, metrics, console, trackers, learning curves."""
