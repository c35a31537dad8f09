namespace {

// Rows are short, so a call of memcpy would take longer than the copy.
template <bool ADDS, typename T>
inline void synkhronos_move(const T* __restrict__ from, T* __restrict__ to, npy_intp n) {
    for (; n >= 8; n -= 8, from += 8, to += 8)
        for (int k = 0; k < 8; ++k) to[k] = ADDS ? to[k] + from[k] : from[k];
    for (npy_intp k = 0; k < n; ++k) to[k] = ADDS ? to[k] + from[k] : from[k];
}

// The pixels of an axis that the place `at` of the filter sees: pixel `i * stride + offset` for i
// from 0 to count - 1. For i from begin to end they exist; the others are the border.
struct SynkhronosPlaces {
    npy_intp count, stride, offset, begin, end;
    SynkhronosPlaces(
            int length, int filter, int dilation, int pad, int both_pads, int stride_, int at) {
        count = (length + both_pads - (filter - 1) * dilation - 1) / stride_ + 1;
        stride = stride_;
        offset = at * dilation - pad;
        begin = offset < 0 ? (-offset + stride - 1) / stride : 0;
        end = offset < length ? (length - 1 - offset) / stride + 1 : 0;
        if (begin > count) begin = count;
        if (end > count) end = count;
        if (end < begin) end = begin;
    }
};

// Copy the pixels that one place of the filter sees to its columns.
template <typename T>
inline void synkhronos_to_columns(
        const T* image, npy_intp width, const SynkhronosPlaces& h, const SynkhronosPlaces& w,
        T* columns) {
    for (npy_intp i = 0; i < h.count; ++i, columns += w.count) {
        if (i < h.begin || i >= h.end) {
            for (npy_intp j = 0; j < w.count; ++j) columns[j] = 0;
            continue;
        }
        const T* row = image + (i * h.stride + h.offset) * width + w.offset;
        for (npy_intp j = 0; j < w.begin; ++j) columns[j] = 0;
        if (w.stride == 1)
            synkhronos_move<false>(row + w.begin, columns + w.begin, w.end - w.begin);
        else
            for (npy_intp j = w.begin; j < w.end; ++j) columns[j] = row[j * w.stride];
        for (npy_intp j = w.end; j < w.count; ++j) columns[j] = 0;
    }
}

// Add the columns of one place of the filter to the pixels that it sees.
template <typename T>
inline void synkhronos_to_image(
        const T* columns, npy_intp width, const SynkhronosPlaces& h, const SynkhronosPlaces& w,
        T* image) {
    for (npy_intp i = h.begin; i < h.end; ++i) {
        T* row = image + (i * h.stride + h.offset) * width + w.offset;
        const T* from = columns + i * w.count;
        if (w.stride == 1)
            synkhronos_move<true>(from + w.begin, row + w.begin, w.end - w.begin);
        else
            for (npy_intp j = w.begin; j < w.end; ++j) row[j * w.stride] += from[j];
    }
}

// From an image to its columns, or back.
template <bool TO_IMAGE, typename T>
void synkhronos_each_place(
        const T* from, const int channels, const int height, const int width,
        const int kernel_h, const int kernel_w, const int dilation_h, const int dilation_w,
        const int pad_hl, const int pad_hr, const int pad_wl, const int pad_wr,
        const int stride_h, const int stride_w, T* to) {
    const npy_intp pixels = (npy_intp) height * width;
    for (int c = 0; c < channels; ++c) {
        for (int kh = 0; kh < kernel_h; ++kh) {
            const SynkhronosPlaces h(
                height, kernel_h, dilation_h, pad_hl, pad_hl + pad_hr, stride_h, kh);
            for (int kw = 0; kw < kernel_w; ++kw) {
                const SynkhronosPlaces w(
                    width, kernel_w, dilation_w, pad_wl, pad_wl + pad_wr, stride_w, kw);
                if (TO_IMAGE) {
                    synkhronos_to_image(from, width, h, w, to);
                    from += h.count * w.count;
                } else {
                    synkhronos_to_columns(from, width, h, w, to);
                    to += h.count * w.count;
                }
            }
        }
        if (TO_IMAGE) to += pixels; else from += pixels;
    }
}

}
