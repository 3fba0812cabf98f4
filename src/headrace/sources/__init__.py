"""Sources: descriptions of data that open readers.

memory        range, counter, from_tensor_slices, from_tensors, random, the elements of a window
generator     from_generator
signature     conversion of values to an output signature
text_files    names of files, and lines of text files
record_files  readers of files of records in any format
framed_records  large records of local files, read one by one
tfrecord      TFRecord files, read and written
example       parsing of tf.Example
features      features of tf.Example, and encoding of examples
protobuf      the part of the protocol buffer encoding that tf.Example needs
parquet       rows of Parquet files
parquet_files  their footers and record batches
parquet_filters  filters of their rows and row groups
arrow_columns  NumPy values of Arrow columns
saved_chunks  finished saved datasets
"""
