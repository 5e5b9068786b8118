# The project's images, one target each:
#
#   controller         the driver alone, without a user, a shell or a file beside it
#   instance-metadata  what tells a node its instance where SMBIOS is hidden
#   node-keeper        looks after the nodes of a Kubernetes cluster
#   simulator          a rack for tests and trials
#   node               the driver and the programs it runs
#   conformance        tells whether a rack does what the driver needs (docs/conformance.md)
#
# `make release` builds them all, without a daemon. The binaries are compiled outside, into
# bin/linux-$TARGETARCH/, so the same file serves buildah, buildx, the builder of older engines and a
# build that reaches no network:
#
#   make binaries
#   docker buildx build --platform linux/amd64,linux/arm64 --target node .
#   DOCKER_BUILDKIT=0 docker build --build-arg TARGETARCH=amd64 --target node .
#
# BASE is any Debian; what the images need of it is installed where it is not there already.
ARG BASE=debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171
ARG VERSION=unreleased
ARG REVISION=unknown

FROM scratch AS empty
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.source="https://github.com/oxidecomputer/oxide-csi-plugin" \
      org.opencontainers.image.vendor="Oxide Computer Company" \
      org.opencontainers.image.licenses="MPL-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM empty AS controller
ARG TARGETARCH
LABEL org.opencontainers.image.title="oxide-csi-plugin" \
      org.opencontainers.image.description="CSI driver for Oxide racks: the controller"
COPY bin/linux-${TARGETARCH}/oxide-csi-plugin /oxide-csi-plugin
USER 65532:65532
ENTRYPOINT ["/oxide-csi-plugin"]

FROM empty AS instance-metadata
ARG TARGETARCH
LABEL org.opencontainers.image.title="oxide-k8s-instance-metadata" \
      org.opencontainers.image.description="Tells the Oxide CSI driver which instance a node is"
COPY bin/linux-${TARGETARCH}/oxide-instance-metadata /oxide-instance-metadata
USER 65532:65532
ENTRYPOINT ["/oxide-instance-metadata"]

FROM empty AS node-keeper
ARG TARGETARCH
LABEL org.opencontainers.image.title="oxide-node-keeper" \
      org.opencontainers.image.description="Looks after the nodes of a Kubernetes cluster on Oxide racks"
COPY bin/linux-${TARGETARCH}/oxide-node-keeper /oxide-node-keeper
USER 65532:65532
ENTRYPOINT ["/oxide-node-keeper"]

# A shell unmounts the disks that can fail (--disks=fuse) should the simulator be killed.
FROM ${BASE} AS simulator
ARG TARGETARCH
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.source="https://github.com/oxidecomputer/oxide-csi-plugin" \
      org.opencontainers.image.vendor="Oxide Computer Company" \
      org.opencontainers.image.licenses="MPL-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.title="oxide-simulator" \
      org.opencontainers.image.description="An Oxide rack on one machine, for tests and trials"
RUN command -v umount || { \
        apt-get update && \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends mount && \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/* /var/log/*; }
COPY bin/linux-${TARGETARCH}/oxide-simulator /usr/local/bin/oxide-simulator
ENTRYPOINT ["/usr/local/bin/oxide-simulator"]

# What the node runs, and nothing beside it, in /node.
FROM ${BASE} AS tools
ARG TOOLS="blkid mke2fs e2fsck resize2fs mkfs.xfs mkfs.btrfs btrfs"
RUN (for tool in ${TOOLS}; do command -v "$tool" || exit 1; done) || { \
        apt-get update && \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            btrfs-progs e2fsprogs util-linux xfsprogs && \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/* /var/log/*; }
COPY tools/node-root /node-root
RUN /node-root /node ${TOOLS}

FROM empty AS node
ARG TARGETARCH
LABEL org.opencontainers.image.title="oxide-csi-plugin-node" \
      org.opencontainers.image.description="CSI driver for Oxide racks: the node and its programs"
ENV PATH=/usr/sbin:/usr/bin
COPY --from=tools /node/ /
COPY bin/linux-${TARGETARCH}/oxide-csi-plugin /oxide-csi-plugin
ENTRYPOINT ["/oxide-csi-plugin"]

# The program, what the driver in it runs, and ssh: --second-shell and --guest-shell are commands
# that reach other instances, and a command in a container cannot use the machine's. A shell is
# there, because this image is for a person who looks around, not for a cluster.
FROM ${BASE} AS conformance
ARG TARGETARCH
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.source="https://github.com/oxidecomputer/oxide-csi-plugin" \
      org.opencontainers.image.vendor="Oxide Computer Company" \
      org.opencontainers.image.licenses="MPL-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.title="oxide-conformance" \
      org.opencontainers.image.description="Tells whether an Oxide rack does what its CSI driver needs"
RUN (for tool in blkid mke2fs e2fsck resize2fs mkfs.xfs mkfs.btrfs btrfs mount ssh; do \
        command -v "$tool" || exit 1; done) || { \
        apt-get update && \
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            btrfs-progs e2fsprogs mount openssh-client util-linux xfsprogs && \
        rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/* /var/log/*; }
COPY bin/linux-${TARGETARCH}/oxide-conformance /usr/local/bin/oxide-conformance
# Reports go where the program is started.
WORKDIR /reports
ENTRYPOINT ["/usr/local/bin/oxide-conformance"]
