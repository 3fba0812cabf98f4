"""Sources: descriptions of data that open readers.

memory        range, counter, from_tensor_slices, from_tensors, random, the elements of a window
generator     from_generator
signature     conversion of values to an output signature
text_files    names of files, and lines of text files
record_files  readers of files of records in any format
framed_records  large records of local files, read one by one
byte_ranges   parts of text files, which workers read independently
byte_range_reader  reader of the records of such parts, in any format
json_lines    files of JSON objects, one on each line
csv_files     CSV files
csv_syntax    headers of CSV files, and the ends of their records
fixed_length  files of records of one length
tfrecord      TFRecord files, read and written
example       parsing of tf.Example
features      features of tf.Example, and encoding of examples
protobuf      the part of the protocol buffer encoding that tf.Example needs
saved_chunks  finished saved datasets
"""
