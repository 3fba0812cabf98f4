"""Elements: nested arrays, their structure and specs, batching arithmetic, the wire frame.

* `structure`: how an element is nested; flatten and unflatten.
* `transpose`: elements of one structure, leaf by leaf.
* `normalize`: what an element is; turns what users return into one.
* `ownership`: whose memory an element's arrays are.
* `description`: structures and dtypes as plain values that travel.
* `spec`: the shapes and dtypes of an element's components.
* `stack`: elements to one stacked element and back.
* `pad`: the same for elements of several shapes.
* `chunk`: n elements, as rows or as columns; what flows between stages.
* `wire`: a chunk as a header and raw buffers.
* `packing`: a frame made smaller for a slow wire.
* `frame_file`: chunks in a file, found again by number.
* `lookup`: words as numbers.
"""
