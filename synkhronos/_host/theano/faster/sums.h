namespace {

// x is (rows, columns). The sums of a tile stay in the L1 cache.
template <typename Acc, typename In, typename Out>
void synkhronos_sum_rows(const In* x, Out* out, npy_intp rows, npy_intp columns) {
    const npy_intp width = 512;
    Acc sums[width];
    for (npy_intp first = 0; first < columns; first += width) {
        const npy_intp n = std::min(width, columns - first);
        for (npy_intp i = 0; i < n; ++i) sums[i] = 0;
        const In* row = x + first;
        npy_intp r = 0;
        for (; r + 4 <= rows; r += 4, row += 4 * columns) {
            const In *a = row, *b = a + columns, *c = b + columns, *d = c + columns;
            // From left to right: the order of the rows.
            for (npy_intp i = 0; i < n; ++i) sums[i] = sums[i] + a[i] + b[i] + c[i] + d[i];
        }
        for (; r < rows; ++r, row += columns)
            for (npy_intp i = 0; i < n; ++i) sums[i] += row[i];
        for (npy_intp i = 0; i < n; ++i) out[first + i] = (Out) sums[i];
    }
}

// x is (rows, channels, pixels); this sums K of the channels.
template <int K, typename Acc, typename In, typename Out>
void synkhronos_sum_channels(
        const In* x, Out* out, npy_intp rows, npy_intp channels, npy_intp pixels) {
    Acc sums[K];
    for (int k = 0; k < K; ++k) sums[k] = 0;
    for (npy_intp r = 0; r < rows; ++r) {
        const In* at = x + r * channels * pixels;
        for (npy_intp i = 0; i < pixels; ++i)
            for (int k = 0; k < K; ++k) sums[k] += at[k * pixels + i];
    }
    for (int k = 0; k < K; ++k) out[k] = (Out) sums[k];
}

template <typename Acc, typename In, typename Out>
void synkhronos_sum(const In* x, Out* out, npy_intp rows, npy_intp channels, npy_intp pixels) {
    if (pixels == 1) return synkhronos_sum_rows<Acc>(x, out, rows, channels);
    npy_intp c = 0;
    for (; c + 8 <= channels; c += 8)
        synkhronos_sum_channels<8, Acc>(x + c * pixels, out + c, rows, channels, pixels);
    for (; c + 4 <= channels; c += 4)
        synkhronos_sum_channels<4, Acc>(x + c * pixels, out + c, rows, channels, pixels);
    for (; c < channels; ++c)
        synkhronos_sum_channels<1, Acc>(x + c * pixels, out + c, rows, channels, pixels);
}

}
