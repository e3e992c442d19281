"""From files to batches: collections, decoding, the cache of decoded images, crops and their augmentation."""
