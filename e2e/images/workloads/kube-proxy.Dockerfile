# kube-proxy and what it runs to write its rules. Any mode of it works, and either iptables.
ARG ROOTFS
FROM ${ROOTFS} AS collect
COPY collect /usr/local/bin/
RUN sh /usr/local/bin/collect /out sh iptables iptables-save iptables-restore \
	ip6tables ip6tables-save ip6tables-restore nft conntrack /usr/lib/*/xtables/*.so

FROM scratch
COPY --from=collect /out/ /
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY kube-proxy /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/kube-proxy"]
