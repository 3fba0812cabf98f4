"""Sources: descriptions of data that open readers.

memory        range, counter, from_tensor_slices, from_tensors, random, the elements of a window
window        the elements of a sliding window
generator     from_generator
stateful_iterable  iterables whose iterators have states, such as those of Grain
signature     conversion of values to an output signature
array_record  ArrayRecord files
mds_samples   samples of MDS shards
mds_columns   decoders of their columns
images        decoding, encoding and resizing of images
image_libraries  the libraries that do it
image_files   image files in a folder per class
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
tar_samples   samples of tar archives in the WebDataset convention
tar_index     division of tar archives into parts, cached in files
tar_members   members of tar archives, read from a stream
tar_decoders  decoders of the files of a sample
example       parsing of tf.Example
features      features of tf.Example, and encoding of examples
protobuf      the part of the protocol buffer encoding that tf.Example needs
parquet       rows of Parquet files
parquet_files  their footers and record batches
parquet_filters  filters of their rows and row groups
arrow_rows    rows of Arrow tables, read by index
lance         rows of Lance datasets
hugging_face  rows of Hugging Face datasets, read from their tables and files
arrow_columns  NumPy values of Arrow columns
saved_chunks  finished saved datasets
"""
