// out (m, n) = a (m, k) x b (k, n), or out += a x b: operands in bfloat16, `out` in float32, no product between.
//
// The products are oneDNN's batch-reduce GEMM on small blocks, as in PyTorch's attention on a CPU. `b` is packed in
// panels of PANEL columns. Rows of `a` become dense blocks, because a gradient's operand is mostly a transposed one.
// That GEMM multiplies pairs of numbers, so an odd depth gets a row and a column of zeros.

#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

using bfloat16 = c10::BFloat16;
namespace blas = at::native::cpublas;

constexpr int64_t PANEL = 64;  // the most columns that oneDNN packs for one block
constexpr int64_t SQUARE = 32;  // the most rows and columns that PyTorch transposes at once

struct Matrix {
  const bfloat16* data;
  int64_t row_stride, column_stride;

  Matrix at(int64_t row, int64_t column) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride};
  }
};

// Copy a matrix into dense rows of `width` numbers.
void copy_dense(Matrix from, int64_t rows, int64_t columns, bfloat16* to, int64_t width) {
  if (from.row_stride == 1 && from.column_stride != 1) {
    for (int64_t i = 0; i < rows; i += SQUARE)
      for (int64_t j = 0; j < columns; j += SQUARE)
        at::vec::transpose_mxn<bfloat16>(from.at(i, j).data, from.column_stride, to + i * width + j, width,
                                         std::min(SQUARE, columns - j), std::min(SQUARE, rows - i));
    return;
  }
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++) to[i * width + j] = *from.at(i, j).data;
}

void pack(Matrix b, int64_t depth, int64_t columns, bfloat16* packed) {
  blas::pack(depth, columns, b.row_stride, PANEL, c10::ScalarType::BFloat16, c10::ScalarType::BFloat16, b.data, packed);
}

}  // namespace

// `depth` and `width`: rows and columns of `b` packed at once; `height`: rows of `a` in a block, of each thread.
// `packed` has room for (depth rounded up to an even number) x (width rounded up to panels), `blocks` for
// max(threads * height, PANEL) x the same depth. Returns whether it succeeded.
extern "C" int float32_sum(float* out, int64_t out_stride, const bfloat16* a_data, int64_t a_row, int64_t a_column,
                           const bfloat16* b_data, int64_t b_row, int64_t b_column, int64_t m, int64_t n, int64_t k,
                           int64_t add, bfloat16* packed, bfloat16* blocks, int64_t depth, int64_t width,
                           int64_t height, int64_t threads) {
  const Matrix a{a_data, a_row, a_column}, b{b_data, b_row, b_column};
  std::atomic<bool> failed{false};
  auto guarded = [&](auto&& work) {  // no exception may leave a parallel region
    try {
      if (!failed) work();
    } catch (...) {
      failed = true;
    }
  };
  for (int64_t q = 0; q < k; q += depth) {
    const int64_t deep = std::min(depth, k - q), even = deep + deep % 2;
    for (int64_t left = 0; left < n; left += width) {
      const int64_t wide = std::min(width, n - left), panels = (wide + PANEL - 1) / PANEL;
      const bool as_it_is = b_column == 1 && b_row >= std::min(PANEL, n) && deep == even;
#pragma omp parallel for num_threads(threads) if (as_it_is)
      for (int64_t p = 0; p < panels; p++)
        guarded([&] {
          const int64_t columns = std::min(PANEL, wide - p * PANEL);
          Matrix panel = b.at(q, left + p * PANEL);
          if (!as_it_is) {  // one after the other, through the memory of the blocks
            copy_dense(panel, deep, columns, blocks, PANEL);
            if (deep < even) std::fill_n(blocks + deep * PANEL, PANEL, bfloat16(0.0f));
            panel = {blocks, PANEL, 1};
          }
          pack(panel, even, columns, packed + p * even * PANEL);
        });
#pragma omp parallel num_threads(threads)
      {
        bfloat16* block = blocks + omp_get_thread_num() * height * even;
#pragma omp for
        for (int64_t top = 0; top < m; top += height)
          guarded([&] {
            const int64_t high = std::min(height, m - top);
            copy_dense(a.at(top, q), high, deep, block, even);
            for (int64_t i = 0; deep < even && i < high; i++) block[i * even + deep] = 0.0f;
            for (int64_t p = 0; p < panels; p++)
              blas::brgemm(high, std::min(PANEL, wide - p * PANEL), even, even, PANEL, out_stride, add || q, block,
                           packed + p * even * PANEL, out + top * out_stride + left + p * PANEL);
          });
        blas::brgemm_release();
      }
    }
  }
  return !failed;
}
