"""Object files and libraries: TVM's LLVM code generator and the C compiler."""
