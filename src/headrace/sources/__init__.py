"""Sources: where elements come from, each a value that opens readers.

memory        range, counter, from_tensor_slices, from_tensors, random, the elements of a window
generator     from_generator
signature     values as a signature asks for them
files         names of files, and lines of text files
record_files  the walk through files of records, whatever their format
framed        large records of local files, read one by one
tfrecord      TFRecord files, read and written
example       tf.Example: features to bytes and back
wire_format   the few rules of protocol buffers that tf.Example needs
saved         saved datasets that are finished
"""
