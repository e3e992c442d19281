"""Labeled data sets that evaluations read: classes, pixels, boxes, video, and the built-in scenes."""
