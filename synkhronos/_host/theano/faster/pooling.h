namespace {

// The pixels of a window, without padding: those from begin to end of an axis of this length.
struct SynkhronosWindows {
    npy_intp length, count, size, stride, pad;
    npy_intp begin(npy_intp window) const {
        const npy_intp at = window * stride - pad;
        return at < 0 ? 0 : at;
    }
    npy_intp end(npy_intp window) const {
        const npy_intp at = window * stride - pad + size;
        return at > length ? length : at;
    }
    bool are_pairs() const { return size == 2 && stride == 2 && pad == 0; }
    npy_intp full_pairs() const { return count < length / 2 ? count : length / 2; }
};

template <typename T>
void synkhronos_max_pool(
        const T* x, T* z, npy_intp images, SynkhronosWindows rows, SynkhronosWindows columns) {
    const bool pairs = rows.are_pairs() && columns.are_pairs();
    const npy_intp full_rows = pairs ? rows.full_pairs() : 0;
    const npy_intp full_columns = pairs ? columns.full_pairs() : 0;
    for (npy_intp image = 0; image < images; ++image) {
        for (npy_intp r = 0; r < rows.count; ++r) {
            T* to = z + r * columns.count;
            npy_intp done = 0;
            if (r < full_rows) {
                const T *above = x + 2 * r * columns.length, *below = above + columns.length;
                for (npy_intp c = 0; c < full_columns; ++c) {
                    T highest = above[2 * c];
                    highest = above[2 * c + 1] > highest ? above[2 * c + 1] : highest;
                    highest = below[2 * c] > highest ? below[2 * c] : highest;
                    highest = below[2 * c + 1] > highest ? below[2 * c + 1] : highest;
                    to[c] = highest;
                }
                done = full_columns;
            }
            const npy_intp row_begin = rows.begin(r), row_end = rows.end(r);
            for (npy_intp c = done; c < columns.count; ++c) {
                const npy_intp begin = columns.begin(c), end = columns.end(c);
                T highest = x[row_begin * columns.length + begin];
                for (npy_intp i = row_begin; i < row_end; ++i)
                    for (npy_intp j = begin; j < end; ++j) {
                        const T a = x[i * columns.length + j];
                        highest = a > highest ? a : highest;
                    }
                to[c] = highest;
            }
        }
        x += rows.length * columns.length;
        z += rows.count * columns.count;
    }
}

// Compilers make vectors of this: no branches, no strides, and no array is another one.
template <typename T>
void synkhronos_where_equal(
        const T* __restrict__ x, const T* __restrict__ highest, const T* __restrict__ from,
        T* __restrict__ to, npy_intp n) {
    for (npy_intp i = 0; i < n; ++i) to[i] = x[i] == highest[i] ? from[i] : (T) 0;
}

// A row of windows of 2 x 2 that do not overlap. Theano adds to zero, which makes 0 of -0.
template <typename T>
void synkhronos_pairs_grad(
        const T* above, const T* below, const T* highest, const T* from, T* to_above, T* to_below,
        npy_intp n) {
    const npy_intp width = 128;
    T highest_twice[2 * width], from_twice[2 * width];
    for (npy_intp first = 0; first < n; first += width) {
        const npy_intp m = n - first < width ? n - first : width;
        for (npy_intp c = 0; c < m; ++c) {
            highest_twice[2 * c] = highest_twice[2 * c + 1] = highest[first + c];
            from_twice[2 * c] = from_twice[2 * c + 1] = (T) 0 + from[first + c];
        }
        const npy_intp at = 2 * first;
        synkhronos_where_equal(above + at, highest_twice, from_twice, to_above + at, 2 * m);
        synkhronos_where_equal(below + at, highest_twice, from_twice, to_below + at, 2 * m);
    }
}

template <typename T>
void synkhronos_max_pool_grad(
        const T* x, const T* z, const T* gz, T* gx, npy_intp images,
        SynkhronosWindows rows, SynkhronosWindows columns) {
    const bool pairs = rows.are_pairs() && columns.are_pairs();
    const npy_intp full_rows = pairs ? rows.full_pairs() : 0;
    const npy_intp full_columns = pairs ? columns.full_pairs() : 0;
    const npy_intp pixels = rows.length * columns.length;
    const bool all_written = 2 * full_rows == rows.length && 2 * full_columns == columns.length;
    for (npy_intp image = 0; image < images; ++image) {
        if (!all_written)
            for (npy_intp i = 0; i < pixels; ++i) gx[i] = 0;
        for (npy_intp r = 0; r < rows.count; ++r) {
            const T *highest = z + r * columns.count, *from = gz + r * columns.count;
            npy_intp done = 0;
            if (r < full_rows) {
                const T *above = x + 2 * r * columns.length, *below = above + columns.length;
                T *to_above = gx + 2 * r * columns.length, *to_below = to_above + columns.length;
                synkhronos_pairs_grad(
                    above, below, highest, from, to_above, to_below, full_columns);
                done = full_columns;
            }
            const npy_intp row_begin = rows.begin(r), row_end = rows.end(r);
            for (npy_intp c = done; c < columns.count; ++c) {
                const npy_intp begin = columns.begin(c), end = columns.end(c);
                for (npy_intp i = row_begin; i < row_end; ++i)
                    for (npy_intp j = begin; j < end; ++j) {
                        const npy_intp at = i * columns.length + j;
                        if (x[at] == highest[c]) gx[at] = gx[at] + from[c];
                    }
            }
        }
        x += pixels;
        gx += pixels;
        z += rows.count * columns.count;
        gz += rows.count * columns.count;
    }
}

}
