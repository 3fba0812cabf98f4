"""Elements: nested arrays, their structures and specs, batching, and serialization.

* `structure`: nesting of an element; flatten and unflatten.
* `transpose`: conversion between elements of one structure and lists of their leaves.
* `normalize`: conversion of users' return values to elements.
* `ownership`: ownership of the memory of an element's arrays.
* `description`: structures and dtypes as plain values that can be sent.
* `dataset_leaf`: datasets as leaves, which windows are, and their spec.
* `spec`: shapes and dtypes of an element's components.
* `stack`: stacking of elements and its inverse.
* `pad`: stacking of elements of different shapes.
* `ragged`: concatenation of arrays of different lengths.
* `keys`: short keys of elements, to find equal ones.
* `chunk`: n elements, as rows or columns, that steps exchange.
* `wire`: serialization of a chunk as a header and raw buffers.
* `frame_compression`: compression of a serialized chunk.
* `frame_file`: files of chunks with access by element number.
* `lookup`: vocabularies that map words to integers.
"""
