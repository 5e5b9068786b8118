# The programs of the control plane and kube-proxy, which are one file, and the programs with which
# kube-proxy writes its rules. Each mode of kube-proxy works, with iptables-legacy or iptables-nft.
ARG ROOTFS
FROM ${ROOTFS} AS collect
COPY collect /usr/local/bin/
RUN sh /usr/local/bin/collect /out sh iptables iptables-save iptables-restore \
	ip6tables ip6tables-save ip6tables-restore nft conntrack /usr/lib/*/xtables/*.so && \
	mkdir -p /out/usr/local/bin && \
	for program in kube-apiserver kube-controller-manager kube-proxy kube-scheduler; do \
		ln -s kubernetes "/out/usr/local/bin/$program"; \
	done

FROM scratch
COPY --from=collect /out/ /
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
COPY kubernetes /usr/local/bin/
