// Arrays in NumPy's .npy format, versions 1 and 2:
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace npy {

struct Array {
  std::string descr;  // NumPy's code for the dtype, such as <f4
  std::vector<int32_t> shape;
  std::vector<char> bytes;
};

inline std::vector<char> read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("there is no file " + path + " that can be read");
  }
  return std::vector<char>(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

// Returns the header's text after a key of its dictionary.
inline std::string value_of(const std::string& header, const std::string& key) {
  const size_t at = header.find("'" + key + "':");
  return at == std::string::npos ? "" : header.substr(header.find_first_not_of(' ', at + key.size() + 3));
}

inline std::vector<int32_t> numbers_in(const std::string& text) {
  std::vector<int32_t> found;
  for (size_t at = 1; at < text.size() && text[at] != ')';) {
    if (text[at] < '0' || text[at] > '9') {
      ++at;
      continue;
    }
    size_t used = 0;
    found.push_back(std::stoi(text.substr(at), &used));
    at += used;
  }
  return found;
}

inline Array parse(const std::string& path, const std::vector<char>& file) {
  const std::string wrong = path + " is not a readable array: ";
  if (file.size() < 12 || std::memcmp(file.data(), "\x93NUMPY", 6) != 0) {
    throw std::runtime_error(wrong + "it does not begin as an .npy file does; write it with numpy.save");
  }
  const auto byte = [&](size_t at) { return static_cast<size_t>(static_cast<unsigned char>(file[at])); };
  const bool first = file[6] == 1;
  const size_t start = first ? 10 : 12;
  const size_t length = first ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (start + length > file.size()) {
    throw std::runtime_error(wrong + "its header is cut off");
  }
  const std::string header(file.data() + start, length);
  if (value_of(header, "fortran_order").rfind("True", 0) == 0) {
    throw std::runtime_error(wrong + "its columns come first; save numpy.ascontiguousarray of it");
  }
  const std::string descr = value_of(header, "descr");
  if (descr.size() < 3 || descr[0] != '\'') {
    throw std::runtime_error(wrong + "its elements are not plain numbers");
  }
  Array array{descr.substr(1, descr.find('\'', 1) - 1), {}, {file.begin() + start + length, file.end()}};
  try {
    array.shape = numbers_in(value_of(header, "shape"));
  } catch (const std::out_of_range&) {
    throw std::runtime_error(wrong + "one of its sizes is larger than 2147483647");
  }
  return array;
}

inline void write(const std::string& path, const std::string& descr, const std::vector<int32_t>& shape, const void* data, size_t bytes) {
  std::string sizes;
  for (const int32_t size : shape) {
    sizes += std::to_string(size) + ",";
  }
  std::string header = "{'descr': '" + descr + "', 'fortran_order': False, 'shape': (" + sizes + "), }";
  header.resize((header.size() + 1 + 10 + 63) / 64 * 64 - 10, ' ');  // the data begin at a multiple of 64
  header.back() = '\n';
  std::ofstream file(path, std::ios::binary);
  const char start[] = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
  file.write(start, sizeof(start)).write(header.data(), header.size()).write(static_cast<const char*>(data), bytes);
  if (!file.flush()) {
    throw std::runtime_error(path + " cannot be written; give -o a folder that is there and may be written to");
  }
}

}  // namespace npy
